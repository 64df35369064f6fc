//! Pages of KV memory: the free list, reference counts, the prefix cache, and the two tenants (target and draft)
//! that share one pool. Knows nothing of rows or tokens beyond the names of full pages.

use hashbrown::HashTable;

use crate::error::{Error, Result};
use crate::prefix::{PageHash, UNNAMED, key};

/// Index of a page.
pub type PageId = u32;

/// Page 0 pads block tables; it is never handed out.
pub const NULL_PAGE: PageId = 0;

/// Whose KV a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenant {
    /// The target model.
    Target,
    /// The draft model. Its pages are never shared.
    Draft,
}

#[derive(Clone, Debug)]
#[repr(align(16))]
struct Page {
    hash: PageHash,
    ref_count: u32,
    tenant: Tenant,
    /// Neighbours in the list of cached pages nobody uses, least recently used first; the null page is its anchor.
    previous: PageId,
    next: PageId,
}

/// All pages of a device. A page is free, owned (by one row or, when shared, by several), or cached: full of known
/// tokens, owned by nobody, kept until its room is needed.
#[derive(Clone, Debug)]
pub struct BlockPool {
    pages: Vec<Page>,
    free: Vec<PageId>,
    /// Pages by their names. The names themselves stand with the pages: a table of half a megabyte, not of two, for a
    /// pool of 32,768 pages.
    names: HashTable<PageId>,
    num_cached: usize,
    owned: [usize; 2],
}

impl BlockPool {
    /// A pool of `num_pages` pages, the null page included.
    #[must_use]
    pub fn new(num_pages: usize) -> Self {
        let blank = Page { ref_count: 0, tenant: Tenant::Target, hash: UNNAMED, previous: NULL_PAGE, next: NULL_PAGE };
        Self {
            pages: vec![blank; num_pages],
            free: (1..num_pages as PageId).rev().collect(),
            names: HashTable::new(),
            num_cached: 0,
            owned: [0; 2],
        }
    }

    /// Pages nobody owns and that hold nothing.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Pages nobody owns that are kept for their content.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// Pages that can be allocated: free ones, and cached ones after eviction.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len() + self.num_cached
    }

    /// Pages owned by a tenant; a shared page counts once.
    #[must_use]
    pub fn owned(&self, tenant: Tenant) -> usize {
        self.owned[tenant as usize]
    }

    /// Takes a page, evicting the least recently used cached page if none is free. `None`: no room.
    pub fn allocate(&mut self, tenant: Tenant) -> Option<PageId> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => self.evict()?,
        };
        let entry = &mut self.pages[page as usize];
        entry.ref_count = 1;
        entry.tenant = tenant;
        self.owned[tenant as usize] += 1;
        Some(page)
    }

    /// Lengthens `table` to `len` pages, or leaves it as it is. `None`: no room.
    pub fn extend(&mut self, table: &mut Vec<PageId>, len: usize, tenant: Tenant) -> Option<()> {
        let missing = len.saturating_sub(table.len());
        if missing > self.available() {
            return None;
        }
        for _ in 0..missing {
            table.push(self.allocate(tenant)?);
        }
        Some(())
    }

    /// Gives back the pages of `table` past the first `keep`, last page first, so that a chain's tail is evicted
    /// before its head. Returns how many were given back.
    pub fn truncate(&mut self, table: &mut Vec<PageId>, keep: usize) -> usize {
        let surplus = table.len().saturating_sub(keep);
        for _ in 0..surplus {
            if let Some(page) = table.pop() {
                self.release(page);
            }
        }
        surplus
    }

    /// Drops one reference. The last one frees the page, or caches it when its content has a name.
    pub fn release(&mut self, page: PageId) {
        let entry = &mut self.pages[page as usize];
        debug_assert!(entry.ref_count > 0, "page {page} released twice");
        entry.ref_count -= 1;
        if entry.ref_count > 0 {
            return;
        }
        self.owned[entry.tenant as usize] -= 1;
        if entry.hash == UNNAMED {
            self.free.push(page);
        } else {
            self.link_last(page);
        }
    }

    /// The page that holds this content, if it is still there.
    #[must_use]
    pub fn lookup(&self, hash: PageHash) -> Option<PageId> {
        self.names.find(key(hash), |&page| self.pages[page as usize].hash == hash).copied()
    }

    /// Whether nobody owns a (cached) page, so that acquiring it makes one page less available.
    #[must_use]
    pub fn is_unowned(&self, page: PageId) -> bool {
        self.pages[page as usize].ref_count == 0
    }

    /// Adds an owner to a page found by [`Self::lookup`].
    pub fn acquire(&mut self, page: PageId) {
        if self.is_unowned(page) {
            self.unlink(page);
            self.owned[Tenant::Target as usize] += 1;
        }
        self.pages[page as usize].ref_count += 1;
    }

    /// Names the content of an owned target page that is full of committed tokens. When another page already holds
    /// the same content, that one keeps the name and this one stays private.
    pub fn publish(&mut self, page: PageId, hash: PageHash) {
        if self.pages[page as usize].hash == UNNAMED && self.lookup(hash).is_none() {
            self.pages[page as usize].hash = hash;
            self.names.insert_unique(key(hash), page, |&page| key(self.pages[page as usize].hash));
        }
    }

    /// Forgets all content; returns how many cached pages became free.
    pub fn clear_cache(&mut self) -> usize {
        let mut freed = 0;
        while let Some(page) = self.evict() {
            self.free.push(page);
            freed += 1;
        }
        for page in self.names.drain() {
            self.pages[page as usize].hash = UNNAMED;
        }
        freed
    }

    fn evict(&mut self) -> Option<PageId> {
        let page = self.pages[NULL_PAGE as usize].next;
        if page == NULL_PAGE {
            return None;
        }
        self.unlink(page);
        let name = std::mem::replace(&mut self.pages[page as usize].hash, UNNAMED);
        if let Ok(entry) = self.names.find_entry(key(name), |&other| other == page) {
            entry.remove();
        }
        Some(page)
    }

    fn link_last(&mut self, page: PageId) {
        let last = self.pages[NULL_PAGE as usize].previous;
        self.pages[page as usize].previous = last;
        self.pages[page as usize].next = NULL_PAGE;
        self.pages[last as usize].next = page;
        self.pages[NULL_PAGE as usize].previous = page;
        self.num_cached += 1;
    }

    fn unlink(&mut self, page: PageId) {
        let Page { previous, next, .. } = self.pages[page as usize];
        self.pages[previous as usize].next = next;
        self.pages[next as usize].previous = previous;
        self.num_cached -= 1;
    }

    /// Checks that every page is exactly one of free, owned and cached, and that reference counts and tenants are
    /// those of `tables`, the block tables of all rows.
    ///
    /// # Errors
    /// `Error::Integrity` that says which page or sum is wrong.
    pub fn check_integrity<'a>(&self, tables: impl Iterator<Item = (Tenant, &'a [PageId])>) -> Result<()> {
        let fail = |message: String| Err(Error::Integrity(message));
        let mut references = vec![0u32; self.pages.len()];
        for (tenant, table) in tables {
            for &page in table {
                let Some(entry) = self.pages.get(page as usize).filter(|_| page != NULL_PAGE) else {
                    return fail(format!("a block table names page {page}, which nobody may own"));
                };
                if entry.tenant != tenant {
                    return fail(format!("page {page} stands in a {tenant:?} table but belongs to {:?}", entry.tenant));
                }
                references[page as usize] += 1;
            }
        }
        let mut state = vec![0u8; self.pages.len()];
        for &page in &self.free {
            state[page as usize] += 1;
            if self.pages[page as usize].hash != UNNAMED {
                return fail(format!("free page {page} still has a name"));
            }
        }
        let mut cached = 0;
        let mut page = self.pages[NULL_PAGE as usize].next;
        while page != NULL_PAGE && cached <= self.pages.len() {
            state[page as usize] += 1;
            cached += 1;
            if self.lookup(self.pages[page as usize].hash) != Some(page) {
                return fail(format!("cached page {page} cannot be found by its name"));
            }
            page = self.pages[page as usize].next;
        }
        let mut owned = [0usize; 2];
        for (page, entry) in self.pages.iter().enumerate().skip(1) {
            if entry.ref_count != references[page] {
                let (count, found) = (entry.ref_count, references[page]);
                return fail(format!("page {page} counts {count} owners but {found} tables name it"));
            }
            if entry.tenant == Tenant::Draft && entry.ref_count > 1 {
                return fail(format!("draft page {page} is owned {} times", entry.ref_count));
            }
            state[page] += u8::from(entry.ref_count > 0);
            owned[entry.tenant as usize] += usize::from(entry.ref_count > 0);
            if state[page] != 1 {
                return fail(format!(
                    "page {page} is in {} of the states free, owned, cached; expected 1",
                    state[page]
                ));
            }
            if entry.hash != UNNAMED && self.lookup(entry.hash) != Some(page as PageId) {
                return fail(format!("page {page} carries a name that belongs to another page"));
            }
        }
        let total = self.free.len() + owned[0] + owned[1] + cached;
        if owned != self.owned || cached != self.num_cached || total != self.pages.len() - 1 || state[0] != 0 {
            let free = self.free.len();
            let all = self.pages.len() - 1;
            return fail(format!("{free} free + {owned:?} owned + {cached} cached pages; expected {all} in all"));
        }
        let named = self.pages.iter().filter(|entry| entry.hash != UNNAMED).count();
        if named != self.names.len() {
            return fail(format!("{named} pages have a name but the prefix cache lists {}", self.names.len()));
        }
        Ok(())
    }
}
