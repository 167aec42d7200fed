"""What a decoder layer does before and after its attention: one protocol, with torch as the specification.

``layer`` is the protocol and a layer's weights, ``specification`` torch's operations; ``fused`` (kernels in Triton) and
``compiled`` (torch.compile) take their place.
"""
