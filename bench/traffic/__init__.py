"""Services under many requests, on timed devices: scale, networks."""
