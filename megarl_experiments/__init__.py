"""`megarl ablate`: a paper's ablation table at demo scale, from its rows to one table and one figure."""
