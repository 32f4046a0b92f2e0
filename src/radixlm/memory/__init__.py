"""The bytes: the KV pool, the device tables, and how big they may be."""
