"""The benchmark that keeps the library honest: interleaved runs, equality before speed, costs measured."""
