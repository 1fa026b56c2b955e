"""KV caches: contiguous and paged, appending, choosing pages."""
