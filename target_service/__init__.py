"""The target service: owns the answer; verifies trees, commits tokens, decides how many nodes pay."""
