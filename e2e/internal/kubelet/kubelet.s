// Empty. See newManagerImpl.
