"""Deployments in simulated time: real workers and policies on timed devices."""
