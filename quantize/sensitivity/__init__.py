"""Mixed precision by measured sensitivity: what each candidate costs the model, and the best choice within a budget."""
