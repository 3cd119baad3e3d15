"""Hybrid models: layers of linear attention, whose states SGLang keeps, between layers of full attention."""
