"""The life of a request: seats, rings and sink blocks."""
