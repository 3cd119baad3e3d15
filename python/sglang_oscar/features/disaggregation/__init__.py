"""Prefill and decode on servers of their own: what goes over, who may take it, and the rows that wait for it."""
