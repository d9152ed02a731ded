"""Lightning's Trainer by a plan: steps of a LightningModule as a model, and a strategy that carries the plan out."""
