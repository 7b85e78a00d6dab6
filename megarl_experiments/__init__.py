"""`megarl ablate`: papers' ablation tables at demo scale."""
