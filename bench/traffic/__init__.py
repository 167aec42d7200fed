"""Services on timed devices, under many requests, over networks, with a drafter that turns bad."""
