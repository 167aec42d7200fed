"""What every room uses: configuration, errors, addresses. It imports nothing of ours."""
