"""What others must know of the kernels: which GPUs run them, and sizes that decide how much memory a step takes."""

# Compute capabilities from which kernels run: all of them, and those in CUDA C++.
OLDEST_FOR_TRITON, OLDEST_FOR_CUDA = (8, 0), (7, 5)
OLDEST_FOR_FP8 = (8, 9)  # for products of eight bits
# Of the cross entropy. Enough rows at a time for matrix products at full speed; half a gigabyte in bf16.
LOGITS_AT_ONCE = 2**28
# Forward of the selective scan keeps one state of so many steps, where shared memory is large, and elsewhere.
STEPS_FOR_A_STATE, STEPS_WITH_LITTLE_ROOM = 32, 16
# Tokens of a chunk of the SSD, where four warps together multiply matrices in shared memory, and elsewhere.
LONG_CHUNK, SHORT_CHUNK = 64, 32
# Of decoding's kernels: the most states of a channel, and the most taps of the convolution.
DECODING_STATES, DECODING_TAPS = 256, 8
