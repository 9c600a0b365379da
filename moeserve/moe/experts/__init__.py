"""Expert kernels: they compute on the rows that reached a rank. One file per kernel family."""
