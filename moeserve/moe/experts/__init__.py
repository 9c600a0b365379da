"""How experts compute on the rows that reached them: one file per kernel family."""
