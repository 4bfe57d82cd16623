//! Checks that the parts of the affinity table agree with each other.

use super::Affinity;

impl Affinity {
    pub fn check_invariants(&self) {
        assert!(self.bindings.len() <= self.bindings_max, "over the bound");
        let mut idle_count = 0;
        for (key, binding) in &self.bindings {
            assert!(self.principals[key.principal()].keys.contains(key), "no principal's");
            assert_eq!(
                binding.turns == 0,
                binding.idle_order_key.is_some(),
                "held but in the idle order"
            );
            if let Some(idle_order_key) = &binding.idle_order_key {
                assert_eq!(self.idle_order.get(idle_order_key), Some(key), "another key's place");
                idle_count += 1;
            }
        }
        assert_eq!(idle_count, self.idle_order.len(), "places of bindings that were removed");
        let principals = self.principals.values();
        let (count, places) = principals.fold((0, 0), |(count, places), principal| {
            assert!(!principal.keys.is_empty(), "a principal without bindings is kept");
            assert!(principal.keys.iter().all(|key| self.bindings.contains_key(key)));
            (count + principal.keys.len(), places + principal.idle_order.len())
        });
        assert_eq!(count, self.bindings.len(), "bindings of no principal");
        assert_eq!(places, idle_count, "places of no principal");
    }
}
