"""The `radixlm` command: one module per verb, imported only when it is typed."""
