"""Executes plans on one device: tables, forward pass, sampling, and the outcome that comes back."""
