"""Processes that compute one model together: who holds which part, and how they add up and put together results."""
