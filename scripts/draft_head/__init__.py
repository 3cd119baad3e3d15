"""A draft head for a small model: what it computes, and how it is trained."""
