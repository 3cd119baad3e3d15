"""The life of a request: rows, rings and sink blocks."""
