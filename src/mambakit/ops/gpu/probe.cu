// Compiled and loaded once, to see whether NVRTC and the driver work here at all.
extern "C" __global__ void probe() {}
