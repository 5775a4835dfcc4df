"""The tests of ipcsync: unit, contract, multiprocess, faults, gpu, benchmarks."""
