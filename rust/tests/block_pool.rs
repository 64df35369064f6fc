//! The pool against a model of it that keeps whole lists, over random operations; and that its self-check finds faults.

use std::collections::HashMap;

use proptest::prelude::*;
use specbatch_core::block_pool::{BlockPool, NULL_PAGE, PageId, Tenant};

#[derive(Clone, Debug)]
enum Action {
    /// A row takes pages for a tenant.
    Extend(usize, usize, Tenant),
    /// A row gives its last pages back.
    Truncate(usize, usize),
    /// A row's page gets a name.
    Publish(usize, u128),
    /// A row shares a page by its name.
    Share(usize, u128),
    Clear,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let tenant = prop_oneof![3 => Just(Tenant::Target), 1 => Just(Tenant::Draft)];
    prop::collection::vec(
        prop_oneof![
            4 => (0..4usize, 0..6usize, tenant).prop_map(|(row, n, tenant)| Action::Extend(row, n, tenant)),
            3 => (0..4usize, 0..6usize).prop_map(|(row, n)| Action::Truncate(row, n)),
            3 => (0..4usize, 1..12u128).prop_map(|(row, name)| Action::Publish(row, name)),
            3 => (0..4usize, 1..12u128).prop_map(|(row, name)| Action::Share(row, name)),
            1 => Just(Action::Clear),
        ],
        0..120,
    )
}

/// What the pool should hold: names by page, and unowned named pages, least recently used first.
#[derive(Default)]
struct Model {
    names: HashMap<u128, PageId>,
    idle: Vec<PageId>,
}

impl Model {
    fn name_of(&self, page: PageId) -> Option<u128> {
        self.names.iter().find(|(_, named)| **named == page).map(|(&name, _)| name)
    }

    fn take(&mut self, page: PageId) {
        if let Some(name) = self.name_of(page) {
            assert_eq!(self.idle.first(), Some(&page), "the least recently used page goes first");
            self.idle.remove(0);
            self.names.remove(&name);
        }
    }

    fn give(&mut self, page: PageId, rows: &[Vec<PageId>]) {
        if self.name_of(page).is_some() && !rows.iter().flatten().any(|&other| other == page) {
            self.idle.push(page);
        }
    }
}

proptest! {
    #[test]
    fn the_pool_is_what_its_model_says(pages in 2..20usize, actions in actions()) {
        let mut pool = BlockPool::new(pages);
        let mut rows: Vec<Vec<PageId>> = vec![vec![]; 4];
        let mut tenants: Vec<Vec<Tenant>> = vec![vec![]; 4];
        let mut model = Model::default();
        for action in actions {
            match action {
                Action::Extend(row, n, tenant) => {
                    // A table belongs to one tenant.
                    let tenant = tenants[row].first().copied().unwrap_or(tenant);
                    let old = rows[row].clone();
                    let room = pool.available();
                    let done = pool.extend(&mut rows[row], old.len() + n, tenant);
                    prop_assert_eq!(done.is_some(), n <= room);
                    let taken = rows[row][old.len()..].to_vec();
                    prop_assert_eq!(taken.len(), if done.is_some() { n } else { 0 });
                    for page in taken {
                        prop_assert!(page != NULL_PAGE);
                        model.take(page);
                    }
                    let len = rows[row].len();
                    tenants[row].resize(len, tenant);
                }
                Action::Truncate(row, n) => {
                    let keep = rows[row].len().saturating_sub(n);
                    let gone = rows[row][keep..].to_vec();
                    prop_assert_eq!(pool.truncate(&mut rows[row], keep), gone.len());
                    tenants[row].truncate(keep);
                    for (i, &page) in gone.iter().enumerate().rev() {
                        let mut held = rows.clone();
                        held.push(gone[..i].to_vec());
                        model.give(page, &held);
                    }
                }
                Action::Publish(row, name) => {
                    if let (Some(&page), Some(Tenant::Target)) = (rows[row].last(), tenants[row].first()) {
                        pool.publish(page, name);
                        if model.name_of(page).is_none() {
                            model.names.entry(name).or_insert(page);
                        }
                    }
                }
                Action::Share(row, name) => {
                    prop_assert_eq!(pool.lookup(name), model.names.get(&name).copied());
                    let target = tenants[row].first().is_none_or(|&tenant| tenant == Tenant::Target);
                    if let (Some(page), true) = (pool.lookup(name), target)
                        && !rows[row].contains(&page)
                    {
                        prop_assert_eq!(pool.is_unowned(page), model.idle.contains(&page));
                        pool.acquire(page);
                        model.idle.retain(|&other| other != page);
                        rows[row].push(page);
                        tenants[row].push(Tenant::Target);
                    }
                }
                Action::Clear => {
                    prop_assert_eq!(pool.clear_cache(), model.idle.len());
                    model = Model::default();
                }
            }
            let tables = rows.iter().zip(&tenants).filter_map(|(table, tenants)| {
                tenants.first().map(|&tenant| (tenant, table.as_slice()))
            });
            prop_assert_eq!(pool.check_integrity(tables), Ok(()));
            prop_assert_eq!(pool.num_cached(), model.idle.len());
            let mut owned: Vec<PageId> = rows.concat();
            owned.sort_unstable();
            owned.dedup();
            prop_assert_eq!(pool.owned(Tenant::Target) + pool.owned(Tenant::Draft), owned.len());
            prop_assert_eq!(pool.num_free() + pool.num_cached() + owned.len(), pages - 1);
        }
    }
}

#[test]
fn the_self_check_finds_what_is_wrong() {
    let mut pool = BlockPool::new(6);
    let mut table = vec![];
    pool.extend(&mut table, 3, Tenant::Target).unwrap();
    let check = |pool: &BlockPool, tenant, pages: &[PageId]| {
        pool.check_integrity([(tenant, pages)].into_iter()).map_err(|error| error.to_string())
    };
    assert_eq!(check(&pool, Tenant::Target, &table), Ok(()));
    for (tenant, pages, message) in [
        (Tenant::Target, vec![table[0], table[1]], "counts 1 owners but 0 tables"),
        (Tenant::Target, [&table[..], &table[..1]].concat(), "counts 1 owners but 2 tables"),
        (Tenant::Target, vec![NULL_PAGE], "page 0, which nobody may own"),
        (Tenant::Target, vec![99], "page 99, which nobody may own"),
        (Tenant::Draft, table.clone(), "stands in a Draft table but belongs to Target"),
    ] {
        let found = check(&pool, tenant, &pages).unwrap_err();
        assert!(found.contains(message), "{found}");
    }
}

#[test]
fn no_room_changes_nothing() {
    let mut pool = BlockPool::new(4);
    let mut table = vec![];
    assert_eq!(pool.extend(&mut table, 4, Tenant::Target), None);
    assert!(table.is_empty());
    assert_eq!(pool.extend(&mut table, 3, Tenant::Draft), Some(()));
    assert_eq!(pool.allocate(Tenant::Target), None);
    assert_eq!((pool.owned(Tenant::Draft), pool.available()), (3, 0));
}
