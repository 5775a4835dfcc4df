"""The demo: a pipeline of real processes whose result proves that their waits hold."""
