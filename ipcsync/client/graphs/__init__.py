"""Points in CUDA graphs: what is captured waits for a gate and writes a tap; ordinary streams beside it do the rest."""
