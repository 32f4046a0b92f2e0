"""Layers of a decoder, built from ops."""
