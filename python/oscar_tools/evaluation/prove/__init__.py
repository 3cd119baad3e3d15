"""``oscar prove MODEL``: what a cache costs a model, measured behind servers that are started here.

A run is caches x measures. :mod:`run` starts one server per cache and lets every measure of :mod:`measures` ask its
*units*, one document, question or session each; answers are kept in :mod:`store` as they come. :mod:`report` has
the measures turn them into numbers with intervals, :mod:`page` and :mod:`plots` show these.
"""
