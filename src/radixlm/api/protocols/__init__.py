"""One dialect per module: parse a body into requests, format what comes back."""
