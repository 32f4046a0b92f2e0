"""The description of the HTTP API: for programs and for people, made from the readers of fields."""
