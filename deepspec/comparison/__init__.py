"""Studies: training variants, run one after the other and compared."""
