"""The draft service: frames in, frames out; absorbs commits, grows trees, emits growth."""
