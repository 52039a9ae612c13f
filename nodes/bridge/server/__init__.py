"""The page: its requests come in, plain values for JSON go out."""
