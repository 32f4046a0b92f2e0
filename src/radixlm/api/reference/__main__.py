"""Prints `docs/api.md`: `python -m radixlm.api.reference > docs/api.md`."""

from radixlm.api.reference.page import markdown

print(markdown(), end="")
