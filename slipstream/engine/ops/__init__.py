"""The operations of a decoder layer before and after its attention: one protocol, with torch as the specification.

``layer`` has the protocol, a layer's weights and torch's operations; ``fused`` (Triton kernels) and ``compiled``
(torch.compile) can replace torch's.
"""
