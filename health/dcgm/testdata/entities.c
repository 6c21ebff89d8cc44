// The scripted libdcgm.so.4: NVSwitches, NVLinks, CPUs and cores, which modules of DCGM measure.
//
// A script sets a link's state (dcgmNvLinkLinkState_t) as the status of its entity, whose number is a dcgm_link_t.

#include "libdcgm.h"

static dcgm_link_t link_of(const entity_t *e) {
    dcgm_link_t link = { .raw = e->id };
    return link;
}

int module_of(const entity_t *e) {
    switch (e->kind) {
        case DCGM_FE_SWITCH: return DcgmModuleIdNvSwitch;
        case DCGM_FE_LINK: return link_of(e).parsed.type == DCGM_FE_SWITCH ? DcgmModuleIdNvSwitch : DcgmModuleIdCore;
        case DCGM_FE_CPU: case DCGM_FE_CPU_CORE: return DcgmModuleIdSysmon;
        default: return DcgmModuleIdCore;
    }
}

dcgm_field_entity_group_t module_level_of(unsigned short field) {
    switch (field) {
        case 1100 ... 1104: case 1120: return DCGM_FE_CPU_CORE;
        case 1110 ... 1112: case 1130 ... 1133: case 1140: case 1141: return DCGM_FE_CPU;
        case 580 ... 592: case 780 ... 823: case 1508: case 1509: case 1525 ... 1533: return DCGM_FE_LINK;
        case 700 ... 779: case 824 ... 899: case 1524: return DCGM_FE_SWITCH;
        default: return DCGM_FE_NONE;
    }
}

// A module refuses to watch the fields of other entities (DcgmModuleSysmon.cpp, DcgmModuleNvSwitch.cpp).
int can_measure(const entity_t *e, unsigned short field) {
    dcgm_field_entity_group_t level = module_level_of(field);
    if (e->kind == DCGM_FE_LINK && strcmp(state.fail, "links") == 0) return 0;
    if (module_of(e) == DcgmModuleIdCore) return 1;
    return level == (dcgm_field_entity_group_t)e->kind || (e->kind == DCGM_FE_CPU && level == DCGM_FE_CPU_CORE);
}

// To end a watch of one entity, a module ends all watches of the client (DcgmModuleSysmon.cpp: ProcessUnwatchFields). An NVLink
// of a GPU counts as one of an NVSwitch (DcgmCacheManager.cpp: helperNvSwitchRemoveFieldWatch).
void unwatch_module(const entity_t *e) {
    int module = e->kind == DCGM_FE_LINK ? DcgmModuleIdNvSwitch : module_of(e);
    for (int i = 0; i < state.entities; i++)
        if (module != DcgmModuleIdCore && module_of(&state.entity[i]) == module)
            for (int j = 0; j < state.entity[i].values; j++) state.entity[i].value[j].watched = 0;
}

EXPORT dcgmReturn_t dcgmGetNvLinkLinkStatus(dcgmHandle_t handle, dcgmNvLinkStatus_v5 *status) {
    ENTER
    if (status->version != dcgmNvLinkStatus_version5) return leave(DCGM_ST_VER_MISMATCH);
    status->numGpus = status->numNvSwitches = 0;
    for (int i = 0; i < state.entities; i++) {
        if (state.entity[i].kind == DCGM_FE_GPU) {
            status->gpus[status->numGpus++].entityId = state.entity[i].id;
        } else if (state.entity[i].kind == DCGM_FE_SWITCH) {
            status->nvSwitches[status->numNvSwitches++].entityId = state.entity[i].id;
        }
    }
    for (int i = 0; i < state.entities; i++) {
        entity_t *e = &state.entity[i];
        dcgm_link_t link = link_of(e);
        if (e->kind != DCGM_FE_LINK) continue;
        for (unsigned j = 0; link.parsed.type == DCGM_FE_GPU && j < status->numGpus; j++)
            if (status->gpus[j].entityId == link.parsed.gpuId) status->gpus[j].linkState[link.parsed.index] = (dcgmNvLinkLinkState_t)e->status;
        for (unsigned j = 0; link.parsed.type == DCGM_FE_SWITCH && j < status->numNvSwitches; j++)
            if (status->nvSwitches[j].entityId == link.parsed.switchId) status->nvSwitches[j].linkState[link.parsed.index] = (dcgmNvLinkLinkState_t)e->status;
    }
    return leave(DCGM_ST_OK);
}

// Without an NVIDIA CPU its module does not load.
EXPORT dcgmReturn_t dcgmGetCpuHierarchy(dcgmHandle_t handle, dcgmCpuHierarchy_v1 *h) {
    ENTER
    h->numCpus = 0;
    for (int i = 0; i < state.entities; i++)
        if (state.entity[i].kind == DCGM_FE_CPU) h->cpus[h->numCpus++].cpuId = state.entity[i].id;
    for (int i = 0; i < state.entities; i++) {
        entity_t *e = &state.entity[i];
        for (unsigned j = 0; e->kind == DCGM_FE_CPU_CORE && j < h->numCpus; j++)
            if (h->cpus[j].cpuId == e->parent) h->cpus[j].ownedCores.bitmask[e->id / 64] |= 1ULL << e->id % 64;
    }
    return leave(h->numCpus == 0 ? DCGM_ST_MODULE_NOT_LOADED : DCGM_ST_OK);
}
