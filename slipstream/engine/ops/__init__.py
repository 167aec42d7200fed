"""What a decoder layer does before and after its attention: one protocol, with torch as the specification.

``layer`` is the protocol, a layer's weights and torch's operations; ``fused`` (kernels in Triton) and ``compiled``
(torch.compile) take their place.
"""
