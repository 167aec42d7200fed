"""The whole idea in an hour: trees, choose and walk, messages, the two sides of a session. No torch, no asyncio."""
