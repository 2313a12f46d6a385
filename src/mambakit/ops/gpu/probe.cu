extern "C" __global__ void probe() {}
