"""What a decoder layer does before and after its attention: one protocol (``layer``), torch as the specification
(``specification``), and whatever takes its place: kernels in Triton (``fused``), torch.compile (``compiled``)."""
