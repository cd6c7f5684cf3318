"""Pure @triton.jit tile functions, shared by kernels: no pointers."""
