"""Attention over the paged KV pool: one interface, backends that are chosen by capability."""
