"""The expert kernels, one file per kernel family. They compute on the rows that a rank received."""
