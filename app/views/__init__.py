"""The pages: layout only. What they show is decided in the modules beside them."""
