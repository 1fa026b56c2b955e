"""Problems of the benchmarks: their inputs, their executed work, how results are checked."""
