"""What a step and a round cost the machine that computes them."""
