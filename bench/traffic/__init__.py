"""Services under many requests, on timed devices: what the router adds, overload, scale, networks."""
