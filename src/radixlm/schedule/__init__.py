"""Decisions: which tokens of which sequence are computed next. No torch, no sockets."""
