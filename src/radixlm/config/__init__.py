"""Configuration: one frozen dataclass per owner (`schema`), made once, by a pure function (`resolve`)."""
