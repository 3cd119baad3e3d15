"""Who owns which bytes of the KV budget."""
